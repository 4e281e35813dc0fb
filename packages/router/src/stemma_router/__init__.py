"""Several servers behind one address: which of them gets a request, and what each of them holds."""
