"""Who a request belongs to: tenants, their keys, their namespaces, and how much each may ask for."""
