"""Sockets, TLS, connections and streams: what lies below the APIs."""
