"""``jaxinfer bench``: measurements that anyone can run again, and verify from their records."""
