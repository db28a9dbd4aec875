"""One file per change of the schema, oldest first; none is ever edited once released."""
