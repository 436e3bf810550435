"""Several engine replicas behind one API: which one gets a request, and what becomes of them."""
