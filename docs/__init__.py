"""The pages of the site, and the programs that write parts of them."""
