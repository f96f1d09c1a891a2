"""What a request passes before a route has it, and its answer after: keys, limits, bodies, headers, connections."""
