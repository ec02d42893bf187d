"""What one launch will be, a frozen value: starts nothing, reads no files, knows no torch."""
