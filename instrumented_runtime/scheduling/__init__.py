"""Who is computed when: queue, batch, admission, fairness between tenants, degrading."""
