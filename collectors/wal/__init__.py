"""The write-ahead log: what is acknowledged is synced here first."""
