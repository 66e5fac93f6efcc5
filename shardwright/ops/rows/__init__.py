"""The rows of the catalog, a module a family of operators."""
