"""What `longhaul` can do, by subject. Each module adds its commands to the parser and runs them."""
