"""What this machine is, each fact with its reason. No torch. Everybody may come in."""
