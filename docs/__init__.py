"""The pages of the site, and the programs that generate parts of them."""
