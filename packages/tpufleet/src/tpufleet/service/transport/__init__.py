"""HTTP: the application, routes, authentication and limits."""
