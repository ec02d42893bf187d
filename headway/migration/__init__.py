"""Migration of scripts from Accelerate: name mapping, differences, import rewriting. No torch."""
