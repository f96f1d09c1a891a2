"""What a hostile world does: kills, wiped stores, full disks, damaged files. Each test says what must hold."""
