"""How requests come in: HTTP, gRPC, JSON, TLS, tokens; and the collector's own metrics."""
