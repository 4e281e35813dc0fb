"""The ledger of admission: what strangers may make a server hold or compute, and its bounds."""
