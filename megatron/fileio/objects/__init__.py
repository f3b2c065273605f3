"""Object stores: a bucket over S3 or Google Cloud Storage, its objects read in ranges and written in parts."""
