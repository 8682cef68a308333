"""What a killed worker costs under several systems: how each is started (`systems`), what its workers do (`worker`)."""
