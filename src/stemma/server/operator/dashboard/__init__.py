"""`/dashboard`: the page, what it shows live, the tree."""
