"""What only a card can show: `make test MARKERS=gpu` on a machine that has one."""
