"""What the backends on torch share. Nothing on the CPU path imports this package."""
