"""Problems and row tables, one module per operator stem. Plain arithmetic; no array library."""
