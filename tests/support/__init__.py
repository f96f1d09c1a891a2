"""What tests share: fakes, processes, made-up records."""
