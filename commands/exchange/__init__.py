"""`headway config import` and `export`: convert settings to and from other tools' formats."""
