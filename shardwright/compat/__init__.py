"""Names of other projects and of the specification, each on a function of this package."""
