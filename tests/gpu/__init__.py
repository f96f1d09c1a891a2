"""What only a GPU can show: `make test MARKERS=gpu` on a machine that has one."""
