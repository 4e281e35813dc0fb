"""Traces of real traffic: one reader per format, one columnar form that everything else uses."""
