"""From stages to text: modules, constructors, forwards, classes, the file."""
