"""What our own stores promise beyond `celery_distlock.testing.StoreContract`: a class a subject."""
