"""The fleet as an endpoint picker: Envoy asks over gRPC which server gets a request (extra `envoy`)."""
