"""From the name of a model to one that is loaded."""
