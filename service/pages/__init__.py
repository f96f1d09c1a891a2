"""What people look at: templates, and the few scripts and styles that go with them."""
