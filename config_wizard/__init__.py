"""The wizard of `headway config`."""
