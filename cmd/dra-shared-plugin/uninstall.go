// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"

	"github.com/dra-shared/dra-driver-shared/api"
	scheduling "github.com/dra-shared/dra-driver-shared/api/scheduling/v1beta1"
	"github.com/dra-shared/dra-driver-shared/internal/restconfig"
)

// newUninstallCheckCommand returns the command that Helm runs before it removes the
// chart. Without a plugin the kubelet cannot unprepare claims, and their pods stay
// Terminating.
func newUninstallCheckCommand() *cobra.Command {
	var driver, kubeconfig string
	c := &cobra.Command{
		Use:   "uninstall-check",
		Short: "Fail while claims hold shares or PodGroups exist",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			rest, err := restconfig.Load(kubeconfig)
			if err != nil {
				return err
			}
			client, err := kubernetes.NewForConfig(rest)
			if err != nil {
				return err
			}
			objects, err := metadata.NewForConfig(rest)
			if err != nil {
				return err
			}
			return errors.Join(checkUninstall(cmd.Context(), client, driver), checkGroups(cmd.Context(), objects))
		},
	}
	c.Flags().StringVar(&driver, "driver-name", api.DriverName, "name of the driver")
	c.Flags().StringVar(&kubeconfig, "kubeconfig", "", "path of a kubeconfig file; default: the pod's service account")
	return c
}

// maxListed is the number of names that a message lists.
const maxListed = 10

// checkUninstall returns an error while reserved claims hold shares.
func checkUninstall(ctx context.Context, client kubernetes.Interface, driver string) error {
	claims, err := client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	var held []string
	for _, c := range claims.Items {
		if len(c.Status.ReservedFor) > 0 && hasShare(c, driver) {
			held = append(held, c.Namespace+"/"+c.Name)
		}
	}
	if len(held) == 0 {
		return nil
	}
	return fmt.Errorf(
		"claims hold shares: %s (%d in total): delete their pods first, or they stay Terminating until the driver is "+
			"installed again; "+
			"helm uninstall --no-hooks skips this check",
		strings.Join(held[:min(len(held), maxListed)], ", "),
		len(held),
	)
}

// checkGroups returns an error while PodGroups exist. Only the controller releases
// their claims and removes their finalizer.
func checkGroups(ctx context.Context, client metadata.Interface) error {
	groups, err := client.Resource(scheduling.GroupVersion.WithResource(scheduling.Resource)).
		List(ctx, metav1.ListOptions{})
	if apierrors.IsNotFound(err) || err == nil && len(groups.Items) == 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list PodGroups: %w", err)
	}
	var names []string
	for _, g := range groups.Items {
		names = append(names, g.Namespace+"/"+g.Name)
	}
	return fmt.Errorf(
		"%d PodGroups exist: %s: delete them and their pods first (kubectl delete podgroups.%s -n NAMESPACE NAME), "+
			"or their claims stay reserved until the driver is installed again",
		len(names),
		strings.Join(names[:min(len(names), maxListed)], ", "),
		scheduling.GroupName,
	)
}

// hasShare reports whether a claim is allocated a device of the driver.
func hasShare(c resourceapi.ResourceClaim, driver string) bool {
	if c.Status.Allocation == nil {
		return false
	}
	for _, r := range c.Status.Allocation.Devices.Results {
		if r.Driver == driver {
			return true
		}
	}
	return false
}
