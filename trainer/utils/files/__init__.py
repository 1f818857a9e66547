"""Files from URLs, checked before they are used, and archives that are taken apart without leaving their folder."""
