"""The stores over Redis or Valkey: with scripts, without them, and by a majority of masters."""
