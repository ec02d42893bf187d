"""Settings to and from other launchers. Only the dispatcher imports from here."""
