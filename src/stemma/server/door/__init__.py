"""The door: who asks (access, keys, tenants), and what strangers may make the server hold and compute."""
