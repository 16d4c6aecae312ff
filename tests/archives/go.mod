module forebay.test/archives

go 1.26
