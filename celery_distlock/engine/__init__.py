"""A lock's life in this process: acquire, renew, abort, release."""
