"""Admission: dispatch, queue or reject a new request, before any replica has it."""
