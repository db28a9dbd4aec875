"""What each listener can be asked, as OpenAPI, for those who generate clients and tests from it."""
