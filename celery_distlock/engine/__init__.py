"""The life of a lock in this process: acquire, renew, abort, release."""
