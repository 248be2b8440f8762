"""The built-in labelled data sets, by the form of their labels."""
