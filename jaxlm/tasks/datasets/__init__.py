"""The built-in labelled data sets, one file each."""
