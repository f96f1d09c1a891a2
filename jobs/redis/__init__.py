"""What is in Redis: records, order, leases, tickets, workers, events as they happen. It can be rebuilt from disk."""
