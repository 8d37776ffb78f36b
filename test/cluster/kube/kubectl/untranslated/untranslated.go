// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package untranslated keeps kubectl from loading translations, which takes a third of the processor time of a start.
package untranslated

import "k8s.io/kubectl/pkg/util/i18n"

// SetLoadTranslationsFunc has to be called before other packages are initialized.
func init() {
	if err := i18n.SetLoadTranslationsFunc(func() error { return nil }); err != nil {
		panic(err)
	}
}
