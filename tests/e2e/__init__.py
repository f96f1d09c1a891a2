"""Real HTTP, real Redis, real RQ workers, a real trainer; Discord and W&B are small servers on loopback."""
