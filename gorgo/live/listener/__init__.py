"""One listening socket: HTTP/1.1 connections of clients, and the ASGI app that serves them."""
