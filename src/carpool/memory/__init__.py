"""Who holds how much device memory: what a device has, what a session will take, and the ledger."""
