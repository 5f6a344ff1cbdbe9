"""What the public modules beside this package are made of. Not an interface: its names may change at any time."""
