"""The pages of the site that are made from the code: settings, commands, routes, metrics, Python's API.

``python -m reference_pages`` writes them into `docs/`, where git ignores them; `make docs` does it first.
"""
