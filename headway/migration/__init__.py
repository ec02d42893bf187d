"""What scripts take from Accelerate, and what becomes of it under Headway. No torch."""
